"""What a user does to a network: convert it, fit its posterior, calibrate, change its classes, diagnose, save."""
