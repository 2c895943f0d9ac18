"""The tests here drive the server with programs that nobody here wrote. `make acceptance` runs them; a plain run does not."""
