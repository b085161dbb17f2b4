"""Which templates to run how often in which region."""
