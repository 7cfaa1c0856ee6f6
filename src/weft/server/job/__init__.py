"""A run as a whole: the driver, its coordinator, its folder, its status and its export."""
