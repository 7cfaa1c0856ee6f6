"""A run: its driver, coordinator, folder, status and export."""
