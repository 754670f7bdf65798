"""The process: nothing here knows a business rule."""
