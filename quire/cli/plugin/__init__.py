"""`quire plugin`: platforms of other packages."""
