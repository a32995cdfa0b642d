"""One block-decoding engine: prompts and seeds go in, tokens and a trace of every judgement come out. A decoder is a
drafter, a rule and a schedule."""
