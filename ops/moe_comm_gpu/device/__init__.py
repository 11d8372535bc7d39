"""What a communication kernel may use: device primitives, the watchdog of every wait, and the runtime that launches."""
