"""Keys that the schema accepts one by one, checked against each other. Nothing is imported from the libraries concerned."""
