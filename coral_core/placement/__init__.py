"""How a model lies over a combination of nodes: enumeration, methods, verification."""
