"""What stands between a report and the server: records that are shuffled, or a sum over two servers that do not work together."""
