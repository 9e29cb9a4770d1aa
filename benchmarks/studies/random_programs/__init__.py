"""Random programs of rows, and what certificates say of them."""
