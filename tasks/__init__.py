"""Units of work behind the flows; usable without Prefect."""
