"""One block-decoding engine; a decoder is a drafter, a rule and a schedule."""
