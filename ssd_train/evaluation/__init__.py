"""What decoders are judged by: traces, tokens and pictures go in; figures, plots and the report come out."""
