"""One schedule a file: each says where its rule is published, and declares a SPEC. `registry` lists them."""
