"""Scripts that train quire-embedder, the small embedding model that ships in the package."""
