"""The cloud: provisioners, what they offer, and the reconciliation of a fleet with a plan (DESIGN 7)."""
