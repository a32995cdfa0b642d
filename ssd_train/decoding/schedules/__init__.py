"""Which positions a pass drafts, feeds and judges: one schedule a file."""
