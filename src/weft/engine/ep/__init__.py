"""Expert parallelism: a rank holds some experts; tokens travel to the ranks of their experts and back."""
