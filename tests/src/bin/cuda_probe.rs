//! Says in one line whether there is a CUDA driver here: for tests that give it drivers of all
//! kinds.

fn main() {
    let first = stepwell_core::sys::driver();
    match &first {
        Ok(driver) => println!("driver {} with {} devices", driver.version(), driver.count()),
        Err(error) => println!("{}: {error}", error.kind()),
    }
    // It stays what it was.
    let told = |answer: stepwell_core::Result<_>| answer.map(|_| ()).map_err(|error| error.to_string());
    assert_eq!(told(stepwell_core::sys::driver()), told(first));
}
