"""The limits of uploads that hold unless the operator has set others."""

MAX_FILE_BYTES = 25 * 1024 * 1024
MAX_REQUEST_BYTES = 50 * 1024 * 1024
