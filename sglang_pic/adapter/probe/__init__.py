"""Forward passes that belong to no request, the slots they borrow, and what tensor-parallel ranks agree on."""
