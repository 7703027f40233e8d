// tw_sram: the SRAM: banks, their arbiters, the crossbar between nine ports and the banks.
//
// Implements "SRAM banks" of docs/concepts/microarchitecture.md: each bank grants one port a
// cycle, the first that requests it in the cyclic order after the one it granted last.

module tw_sram import tw_pkg::*; (
    input  logic                          clk,
    input  logic                          rst,
    input  logic [7:0]                    fault,
    input  sram_request_t [PORTS-1:0]     request,
    output logic [PORTS-1:0]              granted,
    output logic [PORTS-1:0][WB-1:0]      data,
    input  logic [WORD_ADDRESS_BITS-1:0]  debug_address,
    output logic [WB-1:0]                 debug_data
);
  wire f_arbiter_starves = FAULTS_BUILT && fault == FAULT_ARBITER_STARVES;

  localparam int unsigned BANK_BITS = $clog2(SRAM_BANKS);
  localparam int unsigned OFFSET_BITS = BANK_WORDS > 1 ? $clog2(BANK_WORDS) : 1;
  localparam bit POWER = (BANK_WORDS & (BANK_WORDS - 1)) == 0;
  localparam int unsigned DMA0 = 5;
  typedef logic [WORD_ADDRESS_BITS-1:0] word_address_t;
  typedef logic [BANK_BITS-1:0] bank_t;

  function automatic bank_t bank_of(input word_address_t address);
    bank_of = '0;
    if (POWER) bank_of = bank_t'(address / WORD_ADDRESS_BITS'(BANK_WORDS));
    else
      for (int unsigned b = 1; b < SRAM_BANKS; b++)
        if (address >= WORD_ADDRESS_BITS'(b * BANK_WORDS)) bank_of = bank_t'(b);
  endfunction

  function automatic logic [OFFSET_BITS-1:0] offset_of(input word_address_t address);
    offset_of = OFFSET_BITS'(address - WORD_ADDRESS_BITS'(bank_of(address))
        * WORD_ADDRESS_BITS'(BANK_WORDS));
    if (POWER) offset_of = OFFSET_BITS'(address % WORD_ADDRESS_BITS'(BANK_WORDS));
  endfunction

  // The first of `ports`, beginning with those of `behind`, one-hot.
  function automatic logic [PORTS-1:0] first(
      input logic [PORTS-1:0] ports, input logic [PORTS-1:0] behind, input logic starves);
    first = ports;
    if (starves && (ports & (ports - 1'b1)) != '0) first[DMA0] = 1'b0;
    if ((first & behind) != '0) first &= behind;
    first &= ~first + 1'b1;
  endfunction

  bank_t bank[PORTS];
  logic [PORTS-1:0] wanting[SRAM_BANKS];
  logic [PORTS-1:0] chosen[SRAM_BANKS];  // one-hot
  logic [PORTS-1:0] behind_q[SRAM_BANKS];  // the ports after the one granted last

  always_comb begin
    for (int unsigned b = 0; b < SRAM_BANKS; b++) wanting[b] = '0;
    for (int unsigned p = 0; p < PORTS; p++) begin
      bank[p] = '0;
      if (request[p].valid) begin
        bank[p] = bank_of(request[p].address);
        wanting[bank[p]][p] = 1'b1;
      end
    end
  end

  always_comb begin
    granted = '0;
    for (int unsigned b = 0; b < SRAM_BANKS; b++) begin
      chosen[b] = '0;
      if (wanting[b] != '0) begin
        chosen[b] = first(wanting[b], behind_q[b], f_arbiter_starves);
        granted |= chosen[b];
      end
    end
  end

  always_ff @(posedge clk) begin
    for (int unsigned b = 0; b < SRAM_BANKS; b++) begin
      if (rst) behind_q[b] <= '0;
      else if (chosen[b] != '0) behind_q[b] <= ~(chosen[b] | (chosen[b] - 1'b1));
    end
  end

  // What each bank is asked for.
  logic [SRAM_BANKS-1:0] write;
  logic [OFFSET_BITS-1:0] address[SRAM_BANKS];
  logic [W-1:0] mask[SRAM_BANKS];
  logic [WB-1:0] write_data[SRAM_BANKS];
  always_comb begin
    write = '0;
    for (int unsigned b = 0; b < SRAM_BANKS; b++) begin
      address[b] = '0;
      mask[b] = '0;
      write_data[b] = '0;
    end
    for (int unsigned p = 0; p < PORTS; p++) begin
      if (granted[p]) begin
        write[bank[p]] = request[p].write;
        address[bank[p]] = offset_of(request[p].address);
        mask[bank[p]] = request[p].mask;
        write_data[bank[p]] = request[p].data;
      end
    end
  end

  // Banks.
  logic [WB-1:0] read_data[SRAM_BANKS];
  logic [WB-1:0] debug[SRAM_BANKS];
  wire bank_t debug_bank = bank_of(debug_address);
  wire [OFFSET_BITS-1:0] debug_offset = offset_of(debug_address);
  for (genvar b = 0; b < SRAM_BANKS; b++) begin : gen_bank
    tw_bank memory (
        .clk, .rst, .valid(chosen[b] != '0), .write(write[b]), .address(address[b]), .mask(mask[b]),
        .data(write_data[b]), .read_data(read_data[b]), .debug_address(debug_offset),
        .debug_data(debug[b])
    );
  end
  assign debug_data = debug[debug_bank];

  // Read data go to the port that was granted in the cycle before.
  bank_t from_q[PORTS];
  logic [PORTS-1:0] reads_q;
  always_ff @(posedge clk) begin
    for (int unsigned p = 0; p < PORTS; p++) begin
      reads_q[p] <= granted[p] && !request[p].write;
      if (granted[p]) from_q[p] <= bank[p];
    end
  end
  always_comb begin
    for (int unsigned p = 0; p < PORTS; p++) begin
      data[p] = '0;
      if (reads_q[p]) data[p] = read_data[from_q[p]];
    end
  end
endmodule
