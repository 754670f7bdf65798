"""The command line: prints, never decides."""
