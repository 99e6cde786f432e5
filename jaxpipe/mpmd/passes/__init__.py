"""The passes that lower a traced function to the instructions of every rank, one a file."""
