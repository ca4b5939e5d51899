"""The system: options, records and messages, and seven rooms."""
