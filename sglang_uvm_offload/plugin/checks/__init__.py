"""Why a launch cannot be served with offloading: every problem and warning, before anything loads."""
