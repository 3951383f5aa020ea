"""Reports: what leaves clients, in memory and on the wire, and how those of many clients are mixed; a module for each form."""
