"""Small arithmetic and parsing that every plane may use. Imports only the standard library."""
