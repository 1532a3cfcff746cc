"""Turn paths, globs, folders, pipes and URLs into runs, and their files into blocks of whole records."""
