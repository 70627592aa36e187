"""The known schedules by their closed forms, one family a file; catalogue.py names them."""
