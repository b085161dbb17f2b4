"""The edge: settings and user files, validated by pydantic."""
