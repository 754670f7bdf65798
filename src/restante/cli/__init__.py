"""The command line: parses flags, calls the services or the client, prints the result."""
