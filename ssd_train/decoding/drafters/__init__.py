"""Where drafts come from: one drafter a file."""
