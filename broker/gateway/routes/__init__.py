"""The endpoints, one module for each kind; every module has a tuple `ROUTES`."""
