"""Rolling restart: servers behind a plain TCP balancer are started anew one after the other, and no client notices."""
