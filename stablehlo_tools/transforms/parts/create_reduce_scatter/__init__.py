"""How `create-reduce-scatter` finds slices by partition, plans smaller collectives, makes them."""
