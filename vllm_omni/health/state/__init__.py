"""The state machine, what moves it, and what of it others see."""
