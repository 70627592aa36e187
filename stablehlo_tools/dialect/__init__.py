"""What ops mean, written once: tables of names, and the questions that they answer."""
