"""The field's benchmarks: prompts from the official files, pictures in the layout that the official scorer reads."""
