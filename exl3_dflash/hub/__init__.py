"""Names to directories, and publishing."""
