"""Paths, globs, folders, pipes and URLs to runs, and their files to blocks of whole records; CONTRIBUTING says who else reads."""
