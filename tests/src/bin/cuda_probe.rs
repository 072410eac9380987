//! Says in one line whether there is a CUDA driver here: for tests that give it drivers of all kinds.

fn main() {
    match stepwell_core::sys::driver() {
        Ok(driver) => println!("driver {} with {} devices", driver.version(), driver.count()),
        Err(error) => println!("{}: {error}", error.kind()),
    }
    // It stays what it was.
    let again = stepwell_core::sys::driver();
    assert_eq!(again.is_ok(), stepwell_core::sys::driver().is_ok());
}
