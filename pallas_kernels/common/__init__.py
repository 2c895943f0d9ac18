"""What the ops share: the layout of the pool and the checks of shapes."""
