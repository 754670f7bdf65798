"""What every `web.py` stands on: describe an operation, decode a request, answer, refuse."""
