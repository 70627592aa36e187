"""Makes one collective of several; which ones is for others to decide."""
