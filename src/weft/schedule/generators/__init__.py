"""One schedule per file: each names its publication and declares a SPEC. `registry` lists them."""
