"""All that is persisted: keys, schemas, snapshots, records."""
