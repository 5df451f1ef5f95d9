"""What may be chosen: parameter domains, constraints, encoding to and from arrays."""
