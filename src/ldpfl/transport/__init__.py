"""Hide from the server who sent a report: by shuffling records, or by a sum over two servers that do not collude."""
