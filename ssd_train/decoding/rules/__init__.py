"""Which drafts are accepted, and what replaces the others: one acceptance rule a file."""
