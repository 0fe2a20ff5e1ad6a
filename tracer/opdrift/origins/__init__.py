"""Find where two runs come apart: independent origins, told from what merely follows from them."""
