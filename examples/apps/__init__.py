"""Small programs around Quire, each in one file. `README.md` lists them."""
