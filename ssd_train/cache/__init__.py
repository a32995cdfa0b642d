"""Hidden states on disk: samples go in one by one, and come out, checked, in webdataset shards whose manifest says what
made them."""
