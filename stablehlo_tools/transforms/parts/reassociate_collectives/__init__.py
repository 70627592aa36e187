"""What reassociate-collectives is made of."""
